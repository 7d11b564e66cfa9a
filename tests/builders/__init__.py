"""What tests build their data with: plain forms of what the product does in kernels."""
