variable "name" {
  description = "Name of this control plane, part of its resources' names and tags."
  type        = string
  default     = "areal"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,31}$", var.name))
    error_message = "name: must be up to 32 lowercase letters, digits and hyphens, the first one a letter."
  }
}

variable "region" {
  description = "AWS region of the network, the store and the nodes."
  type        = string
}

variable "zones" {
  description = "Availability zones for nodes; choose zones with the GPUs that you need."
  type        = list(string)

  validation {
    condition     = alltrue([for zone in var.zones : startswith(zone, var.region)])
    error_message = "zones: must be availability zones of region, such as us-east-1a of us-east-1."
  }
}

variable "cidr" {
  description = "Address range of the network; a /20 holds a few thousand nodes."
  type        = string
  default     = "10.64.0.0/20"
}

variable "bucket" {
  description = "Name of the store's bucket, globally unique."
  type        = string
}

variable "noncurrent_days" {
  description = "Days for which deleted or replaced objects can be restored."
  type        = number
  default     = 7
}

variable "kms_key_arn" {
  description = "Your KMS key for the encryption of objects; null: S3's own key."
  type        = string
  default     = null
}

variable "image" {
  description = "Machine image of the control machine: Debian or Ubuntu on x86-64."
  type        = string
}

variable "instance_type" {
  description = "Instance type of the control machine; its disks must be NVMe."
  type        = string
  default     = "t3.large"
}

variable "disk_gib" {
  description = "GiB of the control machine's disk for the database and logs."
  type        = number
  default     = 50

  validation {
    condition     = var.disk_gib >= 10 && var.disk_gib <= 16384
    error_message = "disk_gib: must be from 10 to 16384."
  }
}

variable "secrets" {
  description = "Names of SSM parameters: user:password of Prefect's server, and the password of MLflow's user `admin` (at least 12 characters)."
  type = object({
    prefect = string
    mlflow  = string
  })

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
