import assert from "node:assert/strict";
import test from "node:test";
import { handle } from "./handler.js";

function post(body) {
  return handle(new Request("http://f/", { method: "POST", body }));
}

test("answers with JSON in its canonical form", async () => {
  const response = await post('{"b":[{"d":1,"c":2}],"a":null}');
  assert.equal(response.status, 200);
  const expected = { a: null, b: [{ c: 2, d: 1 }] };
  assert.equal(await response.text(), `${JSON.stringify(expected, null, 2)}\n`);
});

test("refuses other bodies and methods", async () => {
  assert.equal((await post("{")).status, 400);
  assert.equal((await handle(new Request("http://f/"))).status, 405);
});
