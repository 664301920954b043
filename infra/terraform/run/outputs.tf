output "hosts" {
  description = "The nodes: name, role, address that the others reach, the cloud's id and type, and whether it may be reclaimed."
  value       = flatten([for pool in module.nodes : pool.hosts])
}
