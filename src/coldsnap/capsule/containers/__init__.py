"""Units in containers that docker or podman makes."""
