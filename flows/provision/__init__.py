"""The nodes of a run: leases, creation with Terraform, cost, and the reaper."""
