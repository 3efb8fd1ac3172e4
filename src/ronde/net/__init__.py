"""How processes of one job find, trust and talk to each other. Used by comm and launch; knows nothing of tensors.

keys         the job's secret and everything that is derived from it
addresses    `host:port` in words and numbers, and which host this is
handshake    both sides prove the key to each other; pure, without sockets
door         authenticated plain sockets: lifelines, data sockets, Unix sockets
descriptors  shared memory and its way to another process; a bell that wakes a poller
messages     what workers and the coordinator say
control      … and the encrypted way they say it
"""
