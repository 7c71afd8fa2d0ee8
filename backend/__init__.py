"""The server: services, operations, resources, checkpoints and the two engines."""
