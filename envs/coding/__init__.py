"""The coding environment: small Python functions, written over several turns, graded on hidden inputs."""
