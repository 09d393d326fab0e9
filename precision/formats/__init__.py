"""What weights are stored in: read, quantize and write every quantization format."""
