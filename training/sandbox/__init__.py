"""Running programs nobody trusts: bubblewrap, limits and a seccomp filter, never the trainer's process.

`bubblewrap` starts a process, `seccomp` says what it may ask of the kernel, `grader` turns replies into
verdicts, and `inside/` holds the few modules that run in the sandbox.
"""
