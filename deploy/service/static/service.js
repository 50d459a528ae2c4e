// Signing out, and the page of the service: it creates and revokes tokens.
"use strict";

(() => {
  const find = (selector) => document.querySelector(selector);
  const send = (method, path, body) => fetch(path, {
    method, headers: { "Content-Type": "application/json", "X-CSRF-Token": find("meta[name=csrf]").content },
    body: body === undefined ? undefined : JSON.stringify(body),
  });

  find("#sign-out")?.addEventListener("click", async () => {
    await send("POST", "/sign-out");
    location.href = "/sign-in";
  });

  find("#new-token")?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const projects = form.get("projects").split(/[\s,]+/).filter(Boolean);
    const answer = await send("POST", "/api/v1/tokens", {
      name: form.get("name"), role: form.get("role"), days: Number(form.get("days")),
      projects: projects.length ? projects : null,
    });
    const found = await answer.json();
    const place = find("#secret");
    place.textContent = answer.ok ? "Shown once, keep it now: " : found.detail;
    if (answer.ok) place.append(Object.assign(document.createElement("code"), { textContent: found.token }));
  });

  for (const button of document.querySelectorAll("[data-revoke]")) {
    button.addEventListener("click", async () => {
      if (!confirm(`Revoke the token of ${button.dataset.name}? It ends at once.`)) return;
      const answer = await send("DELETE", `/api/v1/tokens/${encodeURIComponent(button.dataset.revoke)}`);
      if (answer.ok) location.reload();
      else find("#said").textContent = (await answer.json()).detail;
    });
  }
})();
