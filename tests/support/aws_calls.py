"""Make the calls of docs/how-to/ec2.md to the AWS that the environment names, and print results.

It is a program of its own, for a Python with boto3, which this project's does not have. Its
argument is the folder of deploy/targets/ec2.
"""

import json
import sys
from pathlib import Path
from typing import Any

import boto3

_STACK, _BUCKET, _WORKERS = "downpour", "my-snapshots", 8


def main() -> None:
    """Make the stack, start and end Spark's workers, remove the stack; print what was there."""
    folder = Path(sys.argv[1])
    ec2, stacks = boto3.client("ec2"), boto3.client("cloudformation")
    network = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=network, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
    values = {"Vpc": network, "OperatorCidr": "203.0.113.7/32", "Bucket": _BUCKET}
    stacks.create_stack(
        StackName=_STACK,
        TemplateBody=(folder / "stack.yaml").read_text(),
        Capabilities=["CAPABILITY_NAMED_IAM"],
        Parameters=[{"ParameterKey": name, "ParameterValue": values[name]} for name in values],
    )
    (stack,) = stacks.describe_stacks(StackName=_STACK)["Stacks"]
    outputs = {row["OutputKey"]: row["OutputValue"] for row in stack["Outputs"]}
    rules = list_rules(ec2, outputs)
    ec2.run_instances(
        ImageId=ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"],
        InstanceType="m7i.large",
        MinCount=_WORKERS,
        MaxCount=_WORKERS,
        SubnetId=subnet,
        SecurityGroupIds=[outputs["SparkWorkerGroup"]],
        IamInstanceProfile={"Arn": outputs["ProfileArn"]},
        UserData=(folder / "cloud-init-spark-worker.yaml").read_text(),
        InstanceMarketOptions=json.loads((folder / "spot-workers.json").read_text()),
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": "downpour", "Value": "spark"}]}
        ],
    )
    workers = list_workers(ec2)
    profiles = ec2.describe_iam_instance_profile_associations()["IamInstanceProfileAssociations"]
    ec2.terminate_instances(InstanceIds=[worker["InstanceId"] for worker in workers])
    stacks.delete_stack(StackName=_STACK)
    left = ec2.describe_security_groups(Filters=[{"Name": "tag-key", "Values": ["downpour"]}])
    results = {
        "status": stack["StackStatus"],
        "rules": rules,
        "lifecycles": [worker.get("InstanceLifecycle") for worker in workers],
        "profiles": [row["IamInstanceProfile"]["Arn"].rpartition("/")[2] for row in profiles],
        "states": [worker["State"]["Name"] for worker in list_workers(ec2)],
        "groups_left": len(left["SecurityGroups"]),
        "buckets_left": [row["Name"] for row in boto3.client("s3").list_buckets()["Buckets"]],
    }
    print(json.dumps(results))


def list_rules(ec2: Any, outputs: dict[str, str]) -> list[list[Any]]:
    """Each rule between groups of the stack: listener, client, first and last port."""
    names = {value: name.removesuffix("Group") for name, value in outputs.items()}
    groups = [value for name, value in outputs.items() if name.endswith("Group")]
    return [
        [names[group["GroupId"]], names[pair["GroupId"]], rule["FromPort"], rule["ToPort"]]
        for group in ec2.describe_security_groups(GroupIds=groups)["SecurityGroups"]
        for rule in group["IpPermissions"]
        for pair in rule["UserIdGroupPairs"]
    ]


def list_workers(ec2: Any) -> list[dict[str, Any]]:
    """The instances of Spark, found as the page's teardown finds them."""
    tagged = ec2.describe_instances(Filters=[{"Name": "tag:downpour", "Values": ["spark"]}])
    return [
        instance for reservation in tagged["Reservations"] for instance in reservation["Instances"]
    ]


if __name__ == "__main__":
    main()
