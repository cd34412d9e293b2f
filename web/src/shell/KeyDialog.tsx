import { useState } from "react";
import { declineKey, keyWanted, saveKey } from "../api/key";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { Dialog, DialogForm } from "../ui/Dialog";
import { CheckField, Field } from "../ui/Field";

/** Asks for the API key when the server wants one, or when the person offers it. */
export function KeyDialog({ onSaved }: { onSaved: () => void }) {
  const wanted = useStore(keyWanted);
  const [key, setKey] = useState("");
  const [forGood, setForGood] = useState(false);
  const save = () => {
    if (!key.trim()) return;
    saveKey(key.trim(), forGood);
    setKey("");
    onSaved();
  };
  return (
    <Dialog
      open={wanted !== "no"}
      title={wanted === "offered" ? "API key" : "This server asks for a key"}
      onClose={declineKey}
    >
      <DialogForm onSubmit={save}>
        <Field
          label="API key"
          hint="A line of the file that “mlxr serve --api-keys-file” names. Unless you tick the box, each tab asks for it."
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
        <CheckField
          label="Remember it on this computer, not only in this tab"
          checked={forGood}
          onChange={setForGood}
        />
        <Button kind="primary" type="submit" disabled={!key.trim()}>
          Use this key
        </Button>
      </DialogForm>
    </Dialog>
  );
}
