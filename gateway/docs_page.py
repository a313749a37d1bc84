"""The page under /docs: reads /openapi.json in the browser; no script, style or font of another server."""

DOCS_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pdserve API</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  details { border: 1px solid #ccc; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
  summary { cursor: pointer; } summary b { display: inline-block; width: 4.5rem; }
  code, pre { font: 14px/1.4 ui-monospace, monospace; } pre { background: #f4f4f4; padding: .6rem; overflow: auto; }
  td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
</style>
<h1>pdserve API</h1>
<p>As <a href="openapi.json">openapi.json</a>, which is made of the schemas that validate requests.</p>
<main id="operations">Loading&hellip;</main>
<script>
  const make = (tag, text) => { const node = document.createElement(tag); node.textContent = text ?? ""; return node; };
  const typeOf = (one) => one.type ?? one.$ref?.split("/").pop() ?? "any";
  const kind = (field) => (field.anyOf ?? [field]).map(typeOf).filter((name) => name !== "null").join(" or ");
  const fieldsOf = (schema) => {
    const table = make("table");
    for (const [name, field] of Object.entries(schema.properties)) {
      const row = table.insertRow();
      row.insertCell().append(make("code", name));
      row.insertCell().textContent = kind(field);
      row.insertCell().textContent = (schema.required ?? []).includes(name) ? "required" : "";
    }
    return table;
  };
  const show = (document_, path, method, operation) => {
    const box = make("details"), head = make("summary");
    head.append(make("b", method.toUpperCase()), make("code", path), make("span", " - " + operation.summary));
    box.append(head);
    const reference = operation.requestBody?.content["application/json"].schema.$ref;
    if (reference) box.append(fieldsOf(document_.components.schemas[reference.split("/").pop()]));
    const statuses = Object.entries(operation.responses).map(([status, what]) => status + " " + what.description);
    box.append(make("pre", statuses.join("\\n")));
    return box;
  };
  fetch("openapi.json").then((reply) => reply.json()).then((document_) => {
    const all = Object.entries(document_.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => show(document_, path, method, operation)));
    document.getElementById("operations").replaceChildren(...all);
  }).catch((error) => { document.getElementById("operations").textContent = "openapi.json cannot be read: " + error; });
</script>
</html>
"""
