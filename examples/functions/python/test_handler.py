import json
import unittest

from handler import handle


class HandlerTest(unittest.TestCase):
    def test_a_table_becomes_json(self) -> None:
        status, kind, body = handle("POST", "/", b'name,note\nAda,"a, b"\n')
        self.assertEqual((status, kind), (200, "application/json"))
        self.assertEqual(json.loads(body), [{"name": "Ada", "note": "a, b"}])

    def test_others_are_refused(self) -> None:
        self.assertEqual(handle("GET", "/", b"")[0], 405)
        self.assertEqual(handle("POST", "/", b"\xff")[0], 400)


if __name__ == "__main__":
    unittest.main()
