"""The libvirt platform: carries impacts out on local and remote hypervisors."""
