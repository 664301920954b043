variable "name" {
  description = "Name of the control plane."
  type        = string
}

variable "image" {
  description = "AMI of the machine: Debian or Ubuntu on x86-64."
  type        = string
}

variable "instance_type" {
  description = "Instance type of the machine; its disks must be NVMe."
  type        = string
}

variable "disk_gib" {
  description = "GiB of the disk for the database and logs, which outlives the machine."
  type        = number
}

variable "network" {
  description = "Location of the machine: the network and its address range, and a private subnet with its zone and address range."
  type = object({
    vpc_id      = string
    cidr        = string
    subnet_id   = string
    subnet_cidr = string
    zone        = string
  })
}

variable "bucket" {
  description = "Name and ARN of the store's bucket. MLflow's artifacts are below mlflow/."
  type = object({
    name = string
    arn  = string
  })
}

variable "kms_key_arn" {
  description = "KMS key of the store's objects; null: S3's own key."
  type        = string
  default     = null
}

variable "secrets" {
  description = "Names of SSM parameters: user:password of Prefect's server, and the password of MLflow's user `admin`."
  type = object({
    prefect = string
    mlflow  = string
  })
}

variable "software" {
  description = "The checkout with its Python environment: its path, and a script that installs it if the image lacks it."
  type = object({
    path    = string
    install = string
  })
}
