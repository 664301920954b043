"""What fields and choices of a configuration were called before: they are refused with what they are called now."""

FIELDS = {"launch.elsewhere": "launch.remote_roles", "infra": "devices"}
CHOICES = {
    ("algorithm.objective", "naive"): "standard",
    ("algorithm", "naive"): "standard",
    ("environment.verifier", "same_number"): "mathematics",
    ("task.name", "jsonl"): "rows",
    ("task", "jsonl"): "rows",
}  # by (field or group, name)
