variable "name" {
  description = "Name of the control plane, and prefix of the network's resource names."
  type        = string
}

variable "cidr" {
  description = "Address range of the network; a /20 holds a few thousand nodes."
  type        = string
  default     = "10.64.0.0/20"

  validation {
    condition     = can(cidrsubnet(var.cidr, 4, 15)) && try(tonumber(split("/", var.cidr)[1]) <= 24, false)
    error_message = "cidr: must be an IPv4 block of /24 or larger, such as 10.64.0.0/20."
  }
}

variable "zones" {
  description = "Availability zones for nodes; each gets a private subnet."
  type        = list(string)

  validation {
    condition     = length(var.zones) >= 1 && length(var.zones) <= 6 && length(distinct(var.zones)) == length(var.zones)
    error_message = "zones: must be one to six different availability zones, such as [\"us-east-1a\"]."
  }
}
