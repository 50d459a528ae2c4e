"""The scenarios of bugs that were found, and how many seeds a planted bug may hide from."""

from pathlib import Path

SEEDS_A_BUG = 400
SCENARIOS_AT = Path(__file__).parents[1] / "deploy" / "simulation" / "scenarios"
SCENARIOS = sorted(SCENARIOS_AT.glob("*.toml"))
