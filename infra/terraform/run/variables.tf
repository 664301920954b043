# Variables of one run. Only `foundation`, an output of the root module `control`, is specific to AWS.

variable "run" {
  description = "Id of the run."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{0,39}$", var.run)) # with role and epoch, IAM's limit is 64
    error_message = "run: must be up to 40 lowercase letters, digits, dots and hyphens, the first one a letter or digit."
  }
}

variable "epoch" {
  description = "Epoch of the lease, six hexadecimal digits: part of the names of resources that AWS deletes by name."
  type        = string
  default     = "000000"

  validation {
    condition     = can(regex("^[0-9a-f]{6}$", var.epoch))
    error_message = "epoch: must be six hexadecimal digits."
  }
}

variable "nodes" {
  description = <<-EOT
    Nodes by role (generation, trainer): number of nodes; GPU (none, t4, a10g, l4, l40s, a100-40, a100-80, h100, h200);
    GPUs per node; whether they are spot instances, and their highest price in dollars an hour; GiB of disk.
  EOT
  type = map(object({
    count     = number
    gpu       = optional(string, "h100")
    gpus      = optional(number, 8)
    spot      = optional(bool, false)
    max_price = optional(number)
    disk_gib  = optional(number, 200)
  }))

  validation {
    condition     = length(var.nodes) > 0 && alltrue([for role in keys(var.nodes) : contains(["generation", "trainer"], role)])
    error_message = "nodes: keys must be generation and trainer, at least one of them."
  }
  validation {
    condition     = alltrue([for pool in var.nodes : pool.count >= 0 && pool.count <= 256 && floor(pool.count) == pool.count])
    error_message = "nodes: count must be a whole number from 0 to 256."
  }
  validation {
    condition     = alltrue([for pool in var.nodes : contains(keys(local.types), "${pool.gpus}x${pool.gpu}")])
    error_message = "nodes: gpus and gpu must be one of ${join(", ", keys(local.types))}."
  }
  validation {
    condition     = alltrue([for pool in var.nodes : pool.max_price == null || (pool.spot && try(pool.max_price > 0, false))])
    error_message = "nodes: max_price must be above 0, and null unless spot is true."
  }
  validation {
    condition     = alltrue([for pool in var.nodes : pool.disk_gib >= 50 && pool.disk_gib <= 16384])
    error_message = "nodes: disk_gib must be from 50 to 16384."
  }
}

variable "lease" {
  description = "Owner of the run's resources, and the time at which nodes shut themselves down in any case (RFC 3339, UTC)."
  type = object({
    owner      = string
    expires_at = string
  })

  validation {
    condition     = can(timeadd(var.lease.expires_at, "0s")) && endswith(var.lease.expires_at, "Z")
    error_message = "lease: expires_at must be a time in UTC, such as 2030-01-31T12:00:00Z."
  }
  validation {
    condition     = can(regex("^[A-Za-z0-9 _.:/=+@-]{1,128}$", var.lease.owner))
    error_message = "lease: owner must be 1 to 128 letters, digits, spaces or _.:/=+@-."
  }
}

variable "prefect" {
  description = "Prefect for the nodes' workers: the API's address and a work pool. Queues are named RUN-ROLE."
  type = object({
    api_url   = string
    work_pool = string
  })

  validation {
    condition     = can(regex("^https?://[^/@\\s]+/", var.prefect.api_url))
    error_message = "prefect: api_url must be an address without credentials, such as http://10.64.0.5:4200/api; set PREFECT_API_AUTH_STRING in secrets."
  }
}

variable "environment" {
  description = "Environment variables of the nodes' processes, without secrets."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.environment) : can(regex("^[A-Z][A-Z0-9_]*$", name))])
    error_message = "environment: keys must be uppercase letters, digits and _, such as MLFLOW_TRACKING_URI."
  }
  validation {
    condition     = alltrue([for name in keys(var.environment) : !can(regex("PASSWORD|SECRET|TOKEN|AUTH|KEY", name))])
    error_message = "environment: must hold no password, secret, token or key; set the name of its SSM parameter in secrets."
  }
}

variable "secrets" {
  description = "Secret environment variables of the nodes' processes: the SSM parameter of each."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.secrets) : can(regex("^[A-Z][A-Z0-9_]*$", name))])
    error_message = "secrets: keys must be uppercase letters, digits and _, such as PREFECT_API_AUTH_STRING."
  }
  validation {
    condition     = alltrue([for parameter in values(var.secrets) : can(regex("^/[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$", parameter))])
    error_message = "secrets: values must be names of SSM parameters, such as /areal/prefect-auth, not the secrets themselves."
  }
}

variable "software" {
  description = "The checkout with its Python environment: its path, and a script that installs it if the image lacks it."
  type = object({
    path    = optional(string, "/opt/areal")
    install = optional(string, "echo 'The image has no environment, and software.install is empty.' >&2; exit 1")
  })
  default = {}

  validation {
    condition     = can(regex("^/[A-Za-z0-9_./-]+$", var.software.path))
    error_message = "software: path must be absolute and contain only letters, digits and _.-/."
  }
}

variable "image" {
  description = "Machine image of the nodes: Linux on x86-64 with the GPU driver, bash and systemd."
  type        = string
}

variable "zone" {
  description = "Availability zone of all nodes of the run; null: the first zone of the foundation."
  type        = string
  default     = null
}

variable "fast_network" {
  description = "Whether to use the fast network between GPUs (EFA) and a placement group, if the machines have it."
  type        = bool
  default     = true
}

variable "foundation" {
  description = "Output `foundation` of the root module `control`."
  type = object({
    region      = string
    vpc_id      = string
    subnets     = map(string)
    bucket      = string
    kms_key_arn = optional(string)
  })
}
