"""Nodes that come and go under faults, with a scripted Terraform and a scripted cloud."""
