// Answers with the JSON of the body in a canonical form: keys in order, two spaces of indentation.
export async function handle(request) {
  if (request.method !== "POST") {
    return new Response("send JSON by POST\n", { status: 405, headers: { allow: "POST" } });
  }
  let value;
  try {
    value = JSON.parse(await request.text());
  } catch (error) {
    return new Response(`${error.message}\n`, { status: 400 });
  }
  const body = `${JSON.stringify(sorted(value), null, 2)}\n`;
  return new Response(body, { headers: { "content-type": "application/json" } });
}

function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).map(([key, inner]) => [key, sorted(inner)]);
  return Object.fromEntries(entries.sort(([a], [b]) => (a < b ? -1 : 1)));
}
