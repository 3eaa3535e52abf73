"""Archive of a run: a folder or an S3 bucket with the chain, states, payloads and data. It outlives the run's peers.

    archive.json            which run, and whether it is sealed; written once, first
    blobs/NAME/index        a blob's size and the hash of each 4 MiB chunk, and its bytes where it is one chunk; written last of it
    blobs/NAME/000000 …     its chunks, where it has several
    heads/000000000042      what the archive holds, blobs by digest; numbered, made exclusively, the largest counts

A head is written after everything that it names, and unnamed objects are removed after it: at any instant of a power
failure the newest head is complete. NAME is the blob's digest; in a sealed archive, a keyed hash of it.
"""
