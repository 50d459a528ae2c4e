"""The rows of the registry, one file a subject: signatures, references, bytes and tolerances."""
