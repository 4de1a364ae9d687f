"""One lock for what a process has once: a model while it is measured, random states, switches of torch."""

import threading

#: Held while a measurement has changed something other threads would see. It is one for all models, because torch's
#: random stream and its switches are one for all; a thread that holds it may take it again.
MEASURING = threading.RLock()
