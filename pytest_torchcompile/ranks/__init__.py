"""Who runs where: rank processes, the zygote that forks them, leases of GPUs, and what is told of their end."""
