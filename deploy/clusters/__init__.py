"""The clusters that a run uses: Ray, Spark and the Java under it."""
