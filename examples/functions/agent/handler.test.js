import assert from "node:assert/strict";
import test from "node:test";
import { envelope } from "./connect.js";
import { handle } from "./handler.js";

const env = {
  JIFFY_URL: "http://api.jiffy.internal",
  JIFFY_API_KEY: "e2b_secret",
  JIFFY_CALLBACK_URL: "http://api.jiffy.internal/functions/agent/invoke/",
  JIFFY_CALLBACK_KEY: "e2b_callback",
};

// Replaces the control plane and records its requests.
function controlPlane(create, start) {
  const calls = [];
  globalThis.fetch = async (url, options) => {
    calls.push(`${options.method} ${new URL(url).pathname}`);
    if (url.endsWith("/sandboxes")) {
      assert.equal(options.headers["x-api-key"], env.JIFFY_API_KEY);
      assert.ok(!options.body.includes(env.JIFFY_API_KEY), "the key stays here");
      return create();
    }
    return url.endsWith("/Start") ? start() : new Response(null, { status: 204 });
  };
  return calls;
}

const made = () => Response.json({ sandboxID: "i1", envdAccessToken: "t" }, { status: 201 });
const post = (body, path = "/") =>
  handle(new Request(`http://f${path}`, { method: "POST", body }), env);

test("a program's output is the answer, and its sandbox ends", async () => {
  const events = [
    { event: { start: { pid: 1 } } },
    { event: { data: { stdout: btoa("hello\n") } } },
    { event: { end: { exitCode: 3 } } },
    {},
  ];
  const stream = Buffer.concat(events.map(envelope));
  const calls = controlPlane(made, () => new Response(stream));
  const answer = await (await post("echo hello; exit 3")).json();
  assert.deepEqual(answer, { output: "hello\n", errors: "", status: 3 });
  assert.deepEqual(calls, [
    "POST /sandboxes",
    "POST /process.Process/Start",
    "DELETE /sandboxes/i1",
  ]);
});

test("a sandbox ends also where its program did not start", async () => {
  const calls = controlPlane(made, () => new Response("no", { status: 503 }));
  assert.equal((await post("true")).status, 502);
  assert.equal(calls.at(-1), "DELETE /sandboxes/i1");
});

test("without a sandbox there is an error, and reports need none", async () => {
  const calls = controlPlane(() => new Response("no", { status: 403 }));
  assert.equal((await post("true")).status, 502);
  assert.equal((await post("half done", "/report")).status, 200);
  assert.equal((await handle(new Request("http://f/"), env)).status, 405);
  assert.deepEqual(calls, ["POST /sandboxes"]);
});
