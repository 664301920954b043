variable "name" {
  description = "Of this control plane: what it makes is called so and tagged with it."
  type        = string
  default     = "areal"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,31}$", var.name))
    error_message = "name: must be up to 32 lowercase letters, digits and hyphens, the first one a letter."
  }
}

variable "region" {
  description = "Of the network and the store, and so of the nodes."
  type        = string
}

variable "zones" {
  description = "Availability zones that nodes may be in: those that have the GPUs."
  type        = list(string)

  validation {
    condition     = alltrue([for zone in var.zones : startswith(zone, var.region)])
    error_message = "zones: must be availability zones of the region, as us-east-1a of us-east-1."
  }
}

variable "cidr" {
  description = "Addresses of the network; a /20 holds a few thousand nodes."
  type        = string
  default     = "10.64.0.0/20"
}

variable "bucket" {
  description = "Name of the bucket that is the store, unique in the world."
  type        = string
}

variable "noncurrent_days" {
  description = "Days for which what was deleted or replaced can be brought back."
  type        = number
  default     = 7
}

variable "kms_key_arn" {
  description = "A key of yours that objects are encrypted with; null: S3's own."
  type        = string
  default     = null
}

variable "image" {
  description = "Image that the machine with Prefect and MLflow boots: Debian or Ubuntu on x86-64."
  type        = string
}

variable "instance_type" {
  description = "Of that machine; a type whose disks are NVMe."
  type        = string
  default     = "t3.large"
}

variable "disk_gib" {
  description = "Of that machine, for the database and logs."
  type        = number
  default     = 50

  validation {
    condition     = var.disk_gib >= 10 && var.disk_gib <= 16384
    error_message = "disk_gib: must be from 10 to 16384."
  }
}

variable "secrets" {
  description = "SSM parameters: user:password of Prefect's server, and the password of MLflow's user `admin` (12 characters at least)."
  type = object({
    prefect = string
    mlflow  = string
  })

  validation {
    condition     = alltrue([for parameter in values(var.secrets) : can(regex("^/[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$", parameter))])
    error_message = "secrets: must be names of parameters, as /areal/prefect-auth, never the secrets themselves."
  }
}

variable "software" {
  description = "The checkout with its environment: its path, and a script that makes it where the image has none."
  type = object({
    path    = optional(string, "/opt/areal")
    install = optional(string, "echo 'The image has no environment, and software.install is empty.' >&2; exit 1")
  })
  default = {}

  validation {
    condition     = can(regex("^/[A-Za-z0-9_./-]+$", var.software.path))
    error_message = "software: path must be absolute, of letters, digits and _.-/."
  }
}
