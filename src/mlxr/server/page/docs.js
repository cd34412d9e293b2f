// The page at /docs: every route of openapi.json with its fields, and a form that sends a request. What the server says is
// only ever shown as text.
const $ = (id) => document.getElementById(id);

/** An element with properties and children. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const headers = () => ($("key").value ? { authorization: `Bearer ${$("key").value}` } : {});

async function start() {
  const response = await fetch("./openapi.json", { headers: headers() });
  if (!response.ok) {
    $("routes").replaceChildren(`The server answered ${response.status}. Where it has keys, enter one above.`);
    return;
  }
  const api = await response.json();
  const groups = new Map();
  for (const [path, item] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(item)) {
      const group = operation.tags?.at(-1) ?? "own";
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(drawRoute(api, method.toUpperCase(), path, operation));
    }
  }
  const drawn = [...groups].map(([group, routes]) =>
    make("section", {}, make("h2", { textContent: group }), ...routes),
  );
  $("routes").replaceChildren(...drawn);
  filter();
}

function drawRoute(api, method, path, operation) {
  const about = operation.description ?? operation.summary ?? "";
  const summary = make(
    "summary",
    {},
    make("b", { textContent: method }),
    make("code", { textContent: path }),
    make("span", { textContent: about.split(". ")[0] }),
  );
  const route = make("details", {}, summary);
  route.dataset.text = `${method} ${path} ${about}`.toLowerCase();
  route.addEventListener("toggle", () => {
    if (route.open && route.children.length === 1) route.append(...drawForm(api, method, path, operation, about));
  });
  return route;
}

function drawForm(api, method, path, operation, about) {
  const schema = follow(api, operation.requestBody?.content?.["application/json"]?.schema);
  const target = make("input", { value: path, size: 60, ariaLabel: "Path" });
  const body = make("textarea", { rows: 8, ariaLabel: "Body", value: schema ? example(api, path, schema) : "" });
  const output = make("pre", { hidden: true, tabIndex: 0 });
  const send = make("button", { type: "button", textContent: "Send" });
  send.addEventListener("click", () => ask(method, target.value, schema ? body.value : null, output, send));
  const parts = [make("p", { textContent: about })];
  if (schema?.properties) parts.push(drawFields(api, schema));
  return [...parts, make("p", {}, target, " ", send), ...(schema ? [body] : []), output];
}

function drawFields(api, schema) {
  const rows = Object.entries(schema.properties).map(([name, field]) => {
    const needed = schema.required?.includes(name) ? " (needed)" : "";
    return make(
      "tr",
      {},
      make("td", {}, make("code", { textContent: name }), needed),
      make("td", { textContent: describe(api, field) }),
      make("td", { textContent: field.description ?? "" }),
    );
  });
  return make("details", {}, make("summary", { textContent: `${rows.length} fields` }), make("table", {}, ...rows));
}

/** The schema that a reference means. */
function follow(api, schema) {
  return schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema;
}

/** What a field may hold, in a few words. */
function describe(api, schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1).split("__").at(-1);
  if (schema.enum) return schema.enum.join(", ");
  if ("const" in schema) return String(schema.const);
  const choices = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (choices)
    return [...new Set(choices.filter((one) => one.type !== "null").map((one) => describe(api, one)))].join(" or ");
  return schema.type === "array" ? `list of ${describe(api, schema.items ?? {})}` : (schema.type ?? "any");
}

/** A body that can be sent: a question for the routes that answer, and the needed fields of the others. */
function example(api, path, schema) {
  const question = "What does os.path.join do?";
  const known = {
    messages: [{ role: "user", content: question }],
    prompt: question,
    input: question,
    content: question,
    query: question,
    documents: ["os.path.join joins paths", "json.dumps writes JSON"],
    model: "demo",
    max_tokens: 64,
    stream: false,
  };
  const names = Object.keys(schema.properties ?? {});
  const wanted = names.filter(
    (name) =>
      schema.required?.includes(name) ||
      ["messages", "prompt", "input"].includes(name) ||
      (name === "stream" && path.startsWith("/api")),
  );
  const value = (name) => known[name] ?? empty(follow(api, schema.properties[name]));
  return JSON.stringify(Object.fromEntries(wanted.map((name) => [name, value(name)])), null, 2);
}

function empty(schema) {
  return { array: [], object: {}, integer: 0, number: 0, boolean: false }[schema?.type] ?? "";
}

/** Send a request and show status, headers and what comes, piece by piece. */
async function ask(method, path, body, output, send) {
  output.hidden = false;
  output.textContent = "…";
  send.disabled = true;
  try {
    const type = body === null ? {} : { "content-type": "application/json" };
    const response = await fetch(`.${path}`, { method, body, headers: { ...headers(), ...type } });
    const shown = [...response.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
    output.textContent = `${response.status} ${response.statusText}\n${shown}\n\n`;
    const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await reader?.read(); piece && !piece.done; piece = await reader.read())
      output.append(piece.value);
  } catch (error) {
    output.append(`\n${error}`);
  } finally {
    send.disabled = false;
  }
}

/** Hide the routes that do not have the words of the search. */
function filter() {
  const words = $("search").value.toLowerCase().split(" ");
  for (const route of document.querySelectorAll("main details[data-text]")) {
    route.hidden = !words.every((word) => route.dataset.text.includes(word));
  }
  for (const section of document.querySelectorAll("main section")) {
    section.hidden = !section.querySelector(":scope > details:not([hidden])");
  }
}

$("search").addEventListener("input", filter);
$("key").addEventListener("change", start);
start();
