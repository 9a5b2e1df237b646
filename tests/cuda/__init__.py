"""What needs the CUDA build of torch and the optional packages, but no GPU: `make test-cuda`."""
