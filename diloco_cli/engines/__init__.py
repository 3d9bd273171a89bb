"""What runs a unit as a job: one module an engine, behind the port in port.py."""
