"""What assembles and runs whole jobs: the command line, the run folder, the simulator.

`java_environment` finds a Java for a Spark session of your own.
"""

from deploy.java import java_environment

__all__ = ["java_environment"]
