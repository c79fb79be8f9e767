"""A folder for `sys.path`: `import vllm` finds vllm.py there."""
