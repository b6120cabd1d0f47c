"""What a child process does in test_cache_stores.py: in a module that a spawned process can import."""

from sidestep.cache import disk_store
from sidestep.cache.disk_store import DiskStore


def work(path, name, barrier, failures):
    disk_store._TIMEOUT = 300.0  # seconds for a lock: the test is about what is kept, on a busy machine too
    try:
        store = DiskStore(path)
        barrier.wait(300)
        for number in range(100):
            store.set(f"{name}/{number}", f"{name} {number}".encode() * 100)
            store.set("shared", f"{name}".encode() * 10_000)
            shared = store.get("shared")
            assert shared is not None
            assert shared in {str(other).encode() * 10_000 for other in range(10)}
            if number % 3 == 0:
                assert store.delete(f"{name}/{number}")
        assert len(list(store.keys(f"{name}/"))) == 66
    except BaseException as error:
        failures.put(repr(error))
        raise
