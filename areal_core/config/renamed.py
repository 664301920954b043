"""Fields and choices of a configuration that were renamed or removed: they are refused with the remedy."""

FIELDS = {
    "launch.elsewhere": "is called launch.remote_roles now",
    "infra": "is called devices now",
    "generation.transfer": "was removed: servers load weights from version files; leave it out",
}
CHOICES = {
    ("algorithm.objective", "naive"): "standard",
    ("algorithm", "naive"): "standard",
    ("environment.verifier", "same_number"): "mathematics",
    ("task.name", "jsonl"): "rows",
    ("task", "jsonl"): "rows",
}  # by (field or group, name)
