/** The reference of the API, from the server's OpenAPI schema. */

import { json } from "./api.js";
import { node } from "./words.js";

const place = document.getElementById("operations");

const schema = await json("openapi.json").catch((error) => {
  const hint = error.status === 401 ? " Enter it on the page of the server, in this tab, and come back." : "";
  document.getElementById("problem").textContent = error.message + hint;
});

/** Follows a reference inside the schema. */
const resolved = (value) => (value.$ref ? value.$ref.slice(2).split("/").reduce((at, name) => at[name], schema) : value);

/** Describes the values of a field in a few words. */
function kind(field) {
  if (field.$ref) return kind(resolved(field));
  const options = field.anyOf ?? field.oneOf;
  if (options) return [...new Set(options.map(kind))].filter((each) => each !== "null").join(" or ");
  if (field.enum ?? field.const) return (field.enum ?? [field.const]).map((each) => JSON.stringify(each)).join(" or ");
  if (field.format === "binary") return "file";
  const bounds = [
    ["≥", field.minimum], [">", field.exclusiveMinimum], ["≤", field.maximum], ["<", field.exclusiveMaximum],
  ].filter(([, bound]) => bound !== undefined);
  const items = field.type === "array" ? ` of ${kind(field.items ?? {})}` : "";
  return (field.type ?? field.title ?? "any") + items + bounds.map(([sign, bound]) => ` ${sign} ${bound}`).join("");
}

/** A table of names, types and descriptions. */
function table(title, rows) {
  const [wrapper, body] = [node("div", "", { class: "scroll" }), node("table")];
  body.append(node("caption", title));
  for (const [name, type, text] of rows) {
    const row = node("tr");
    row.append(node("th", name, { scope: "row" }), node("td", type), node("td", text ?? ""));
    body.append(row);
  }
  wrapper.append(body);
  return wrapper;
}

function operation(method, path, { summary, description, parameters = [], requestBody, responses }) {
  const section = node("section");
  const heading = node("h3");
  heading.append(node("code", `${method.toUpperCase()} ${path}`));
  section.append(heading, node("p", (description ?? summary).replaceAll("`", "")));
  const values = parameters.map((each) => [each.name, kind(each.schema), each.required ? "required" : each.description]);
  if (values.length) section.append(table("Parameters", values));
  const bodies = Object.values(requestBody?.content ?? {}).map((body) => resolved(body.schema));
  if (bodies.length) {
    const { properties, required = [] } = bodies[0];
    const rows = Object.keys(properties).map((name) => {
      const kinds = new Set(bodies.map((body) => kind(body.properties[name])));
      return [name, [...kinds].join(" or "), required.includes(name) ? "required" : properties[name].description];
    });
    section.append(table(`Body: ${Object.keys(requestBody.content).join(" or ")}`, rows));
  }
  const answers = Object.entries(responses).map(([status, answer]) => [status, Object.keys(answer.content ?? {}).join(", "), answer.description]);
  section.append(table("Responses", answers));
  return section;
}

const groups = new Map();
for (const [path, methods] of Object.entries(schema?.paths ?? {})) {
  for (const [method, details] of Object.entries(methods)) {
    const [tag = "other"] = details.tags ?? [];
    groups.set(tag, [...(groups.get(tag) ?? []), operation(method, path, details)]);
  }
}
for (const [tag, sections] of groups) place.append(node("h2", tag[0].toUpperCase() + tag.slice(1)), ...sections);
