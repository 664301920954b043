variable "run" {
  description = "Id of the run."
  type        = string
}

variable "role" {
  description = "Role of the nodes: generation or trainer."
  type        = string
}

variable "epoch" {
  description = "Part of the names of resources that AWS deletes by name. So a process with an earlier lease can't delete resources made under this lease."
  type        = string
  default     = "000000"
}

variable "nodes" {
  description = "Number of nodes."
  type        = number
}

variable "instance_type" {
  description = "Instance type of each node."
  type        = string
}

variable "image" {
  description = "AMI of the nodes: Linux on x86-64 with NVIDIA's driver, bash and systemd."
  type        = string
}

variable "disk_gib" {
  description = "GiB of each node's disk, for the system, the environment, models and versions."
  type        = number
}

variable "spot" {
  description = "Whether the nodes are spot instances, which AWS may reclaim with two minutes' notice."
  type        = bool
}

variable "max_price" {
  description = "Highest price of a spot node, in dollars an hour; null: the on-demand price."
  type        = number
  default     = null
}

variable "efa" {
  description = "Whether to use EFA, the fast network for NCCL, and a placement group, if the type has EFA."
  type        = bool
}

variable "network" {
  description = "Location of the nodes: a subnet, its zone, and the run's security groups."
  type = object({
    subnet_id       = string
    zone            = string
    security_groups = list(string)
  })
}

variable "policy" {
  description = "IAM policy of the nodes, in JSON."
  type        = string
}

variable "expires_at" {
  description = "Time at which each node shuts itself down and terminates, in any case (RFC 3339, UTC)."
  type        = string
}

variable "node" {
  description = "Boot file of a node (flows/node.py): names of secrets, but no values."
  type        = any
}

variable "software" {
  description = "The checkout with its Python environment: its path, and a script that installs it if the image lacks it."
  type = object({
    path    = string
    install = string
  })
}

variable "tags" {
  description = "Tags of all resources. A launch template does not apply the provider's default tags."
  type        = map(string)
}
