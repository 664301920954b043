"""Nodes that come and go under faults: terraform and cloud by script, owners and reapers that are real processes."""
