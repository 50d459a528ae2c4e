"""The rows of the registry, a file for each subject: signatures, references, bytes, tolerances."""
