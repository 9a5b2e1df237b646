"""The Diffusers integration: run a pipeline or transformer with its tokens split over the ranks."""
