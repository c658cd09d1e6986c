// Runs the program of each request in a new sandbox, and responds with its output.
//
// Deployed with `--sandbox-key create`, which provides a key and the address of the control plane. The
// program can reach only this function: requests to $JIFFY_CALLBACK_URL are logged here.
import { envelope, messages } from "./connect.js";

// Seconds after which a sandbox is killed, if this function did not kill it.
const TIMEOUT = 120;

export async function handle(request, env) {
  if (request.method !== "POST") {
    return new Response("send a program by POST\n", { status: 405, headers: { allow: "POST" } });
  }
  if (new URL(request.url).pathname.endsWith("/report")) {
    console.log(`report: ${await request.text()}`);
    return new Response("noted\n");
  }
  const program = await request.text();
  const created = await call(env, "POST", "/sandboxes", {
    templateID: "base",
    timeout: TIMEOUT,
    secure: true,
    allow_internet_access: false,
    network: { allowOut: [new URL(env.JIFFY_URL).hostname] },
    // This key is only valid for callbacks. The other key stays in this function.
    envVars: {
      JIFFY_CALLBACK_URL: env.JIFFY_CALLBACK_URL,
      JIFFY_CALLBACK_KEY: env.JIFFY_CALLBACK_KEY,
    },
  });
  if (!created.ok) return failed("no sandbox", await created.text());
  const sandbox = await created.json();
  try {
    return await run(env, sandbox, program);
  } finally {
    await call(env, "DELETE", `/sandboxes/${sandbox.sandboxID}`);
  }
}

function call(env, method, path, body) {
  const headers = { "x-api-key": env.JIFFY_API_KEY, "content-type": "application/json" };
  return fetch(`${env.JIFFY_URL}${path}`, { method, headers, body: body && JSON.stringify(body) });
}

// Runs a shell program through the sandbox's agent, which requires its own token.
async function run(env, sandbox, program) {
  const started = await fetch(`${env.JIFFY_URL}/process.Process/Start`, {
    method: "POST",
    headers: {
      "e2b-sandbox-id": sandbox.sandboxID,
      "e2b-sandbox-port": "49983",
      "x-access-token": sandbox.envdAccessToken,
      authorization: `Basic ${btoa("user:")}`,
      "content-type": "application/connect+json",
      "connect-protocol-version": "1",
    },
    body: envelope({ process: { cmd: "/bin/sh", args: ["-c", program] } }),
  });
  if (!started.ok) return failed("the program was not started", await started.text());
  const answer = { output: "", errors: "", status: null };
  for (const { event } of messages(new Uint8Array(await started.arrayBuffer()))) {
    answer.output += atob(event?.data?.stdout ?? "");
    answer.errors += atob(event?.data?.stderr ?? "");
    if (event?.end) answer.status = event.end.exitCode ?? 0;
  }
  return Response.json(answer);
}

function failed(what, why) {
  return new Response(`${what}: ${why}\n`, { status: 502 });
}
