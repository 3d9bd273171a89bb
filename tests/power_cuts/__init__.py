"""What a power cut can leave of a local store: every legal state of the disk, enumerated.

`recorder` notes what LocalStore asks of the kernel, `disk` knows which states a file system without a journal may be in
after a cut at any moment, `workload` is what was being done, `study` writes each state into a directory and proves that
the run goes on from there. The full count: python -m tests.power_cuts.study --states 5000
"""
