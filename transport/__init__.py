"""The I/O that node and coordinator share: TLS, gRPC, DHT, blobs, files, supervision."""
