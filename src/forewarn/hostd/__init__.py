"""The daemon on a hypervisor: relays its guests' requests, carries out the impacts of its host, and
reports its VMs.
"""
