variable "run" {
  description = "The run that the nodes are for."
  type        = string
}

variable "role" {
  description = "What the nodes do: generation or trainer."
  type        = string
}

variable "epoch" {
  description = "Part of the names of what AWS deletes by name: who deletes what was made under an earlier lease can't hit what is made under this one."
  type        = string
  default     = "000000"
}

variable "nodes" {
  description = "How many."
  type        = number
}

variable "instance_type" {
  description = "Of each node."
  type        = string
}

variable "image" {
  description = "AMI that the nodes boot: Linux on x86-64 with NVIDIA's driver, bash and systemd."
  type        = string
}

variable "disk_gib" {
  description = "Of each node, for the system, the environment, models and versions."
  type        = number
}

variable "spot" {
  description = "Whether the nodes may be reclaimed, with two minutes' notice."
  type        = bool
}

variable "max_price" {
  description = "Most that a spot node may cost, in dollars an hour; null: what it costs on demand."
  type        = number
  default     = null
}

variable "efa" {
  description = "Whether types that have EFA, the network that NCCL is fast over, get it, in a placement group."
  type        = bool
}

variable "network" {
  description = "Where the nodes are: a subnet, its zone, and the security groups of the run."
  type = object({
    subnet_id       = string
    zone            = string
    security_groups = list(string)
  })
}

variable "policy" {
  description = "What the nodes may do, an IAM policy in JSON."
  type        = string
}

variable "expires_at" {
  description = "When a node shuts itself down and so terminates, whatever happens elsewhere (RFC 3339, UTC)."
  type        = string
}

variable "node" {
  description = "What a node is told of its run (flows/node.py): no secrets, but where they lie."
  type        = any
}

variable "software" {
  description = "The checkout with its environment: its path, and a script that makes it where the image has none."
  type = object({
    path    = string
    install = string
  })
}

variable "tags" {
  description = "Of everything. What a launch template starts does not get a provider's default tags."
  type        = map(string)
}
