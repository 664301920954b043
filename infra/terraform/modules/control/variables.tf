variable "name" {
  description = "Of the control plane."
  type        = string
}

variable "image" {
  description = "AMI that the machine boots: Debian or Ubuntu on x86-64."
  type        = string
}

variable "instance_type" {
  description = "Of the machine; a type whose disks are NVMe."
  type        = string
}

variable "disk_gib" {
  description = "For the database and logs; the disk outlives the machine."
  type        = number
}

variable "network" {
  description = "Where the machine is: the network, its addresses, a private subnet and its zone and addresses."
  type = object({
    vpc_id      = string
    cidr        = string
    subnet_id   = string
    subnet_cidr = string
    zone        = string
  })
}

variable "bucket" {
  description = "The store: its name and ARN. MLflow's artifacts lie below mlflow/."
  type = object({
    name = string
    arn  = string
  })
}

variable "kms_key_arn" {
  description = "The key that the store's objects are encrypted with; null: S3's own."
  type        = string
  default     = null
}

variable "secrets" {
  description = "SSM parameters: user:password of Prefect's server, and the password of MLflow's user `admin`."
  type = object({
    prefect = string
    mlflow  = string
  })
}

variable "software" {
  description = "The checkout with its environment: its path, and a script that makes it where the image has none."
  type = object({
    path    = string
    install = string
  })
}
