output "hosts" {
  description = "The nodes: name, role, address for other nodes, instance id, instance type, and whether the node is a spot instance."
  value       = flatten([for pool in module.nodes : pool.hosts])
}
