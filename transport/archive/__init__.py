"""What outlives a run's peers: a folder or an S3 bucket with the chain, states, payloads and data of one run.

    archive.json            which run, and whether it is sealed; written once, first
    blobs/NAME/index        a blob's size and the hash of each 4 MiB chunk, and its bytes where it is one chunk; written last of it
    blobs/NAME/000000 …     its chunks, where it has several
    heads/000000000042      what the archive holds, blobs by digest; numbered, made exclusively, the largest counts

A head is written when everything that it names is there, and what it names no longer goes after it: whatever instant the power
fails at, the newest head is whole. NAME is the blob's digest, in a sealed archive a keyed hash of it.
"""
