import { useState } from "react";
import { keyWanted, saveKey } from "../api/key";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { Dialog } from "../ui/Dialog";
import { Field } from "../ui/Field";

/** Asks for the API key when the server wants one. */
export function KeyDialog({ onSaved }: { onSaved: () => void }) {
  const wanted = useStore(keyWanted);
  const [key, setKey] = useState("");
  const [forGood, setForGood] = useState(false);
  const save = (event: React.FormEvent) => {
    event.preventDefault();
    if (!key.trim()) return;
    saveKey(key.trim(), forGood);
    setKey("");
    onSaved();
  };
  return (
    <Dialog open={wanted !== "no"} title="This server asks for a key" onClose={() => keyWanted.set("no")}>
      <form onSubmit={save} style={{ display: "grid", gap: "var(--gap-4)" }}>
        <Field
          label="API key"
          hint="A line of the file that “mlxr serve --api-keys-file” names."
          error={wanted === "wrong" ? "The server does not know this key." : null}
        >
          {(ids) => (
            <input
              {...ids}
              type="password"
              autoComplete="off"
              spellCheck={false}
              value={key}
              onChange={(event) => setKey(event.target.value)}
            />
          )}
        </Field>
        <label>
          <input type="checkbox" checked={forGood} onChange={(event) => setForGood(event.target.checked)} /> Remember it
          on this computer, not only in this tab
        </label>
        <Button kind="primary" type="submit" disabled={!key.trim()}>
          Use this key
        </Button>
      </form>
    </Dialog>
  );
}
