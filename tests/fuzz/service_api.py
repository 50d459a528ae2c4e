"""Generated requests for every operation of the service's OpenAPI document.

    python -m tests.fuzz.service_api [EXAMPLES]

Each answer must be one that the document describes, errors as problem+json, and never a 5xx. The
service runs in this process with tokens, and starts no job. The exit status is 1 for a violation.
"""

import sys
import tempfile
from pathlib import Path

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from deploy.service.access import Exposure
from deploy.service.app import ServeOptions, Service, application
from deploy.service.database_tables import DATABASE, open_database
from deploy.service.submissions import Submitted
from deploy.service.tokens import TokenRole

CHECKS = (
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance,
)  # fmt: skip
ENDLESS = {"/api/v1/stream"}


def main(examples: int) -> int:
    """Fuzz every operation; returns the number of those with a violation."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        demo = Path(__file__).parents[2] / "deploy" / "demo"
        exposure = Exposure(tokens=True)
        options = ServeOptions(home=home, slots=4, roots=(demo,), exposure=exposure)
        service = Service(options, open_database(home / DATABASE))
        _, token = service.access.create_token("fuzz", TokenRole.ADMINISTRATOR, None, 86400.0)
        headers = {"Authorization": f"Bearer {token}", "Host": "127.0.0.1"}
        app = application(service)
        solver = str(demo / "lenet_solver.prototxt")
        job = service.admission.submit(Submitted(settings={"solver": solver})).id
        schema = schemathesis.openapi.from_dict(app.openapi())
        schema.app = app
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path in ENDLESS:
                continue

            @given(case=operation.as_strategy())
            @settings(
                max_examples=examples, deadline=None, database=None, derandomize=True,
                phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def attack(case: schemathesis.Case) -> None:
                if "job" in (case.path_parameters or {}) and len(case.path_parameters["job"]) % 2:
                    case.path_parameters["job"] = job
                case.call_and_validate(headers=headers, checks=list(CHECKS))

            try:
                attack()
            except (FailureGroup, Exception) as error:  # noqa: BLE001  # each gets its turn
                failed += 1
                print(f"FAILED {operation.label}: {error}")
            else:
                print(f"ok     {operation.label}")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)))
