import { useId, useState } from "react";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { Dialog, DialogForm } from "../ui/Dialog";
import { Field } from "../ui/Field";
import { arrangeConversations, conversations } from "./library";

/** Asks for the folder of conversations; an empty name takes them out of theirs. */
export function FolderDialog({ open, ids, onClose }: { open: boolean; ids: readonly string[]; onClose: () => void }) {
  return (
    <Dialog open={open} title="Move to a folder" onClose={onClose}>
      {open && <FolderForm ids={ids} onClose={onClose} />}
    </Dialog>
  );
}

function FolderForm({ ids, onClose }: { ids: readonly string[]; onClose: () => void }) {
  const list = useId();
  const all = useStore(conversations) ?? [];
  const folders = [...new Set(all.flatMap((one) => one.folder ?? []))].sort();
  const [folder, setFolder] = useState(all.find((one) => one.id === ids[0])?.folder ?? "");
  const save = () => {
    arrangeConversations(ids, { folder: folder.trim() });
    onClose();
  };
  return (
    <DialogForm onSubmit={save}>
      <Field label="Folder" hint="A new name makes a new folder. Empty: in none.">
        {(ids) => (
          <input
            {...ids}
            list={list}
            value={folder}
            maxLength={60}
            autoComplete="off"
            onChange={(event) => setFolder(event.target.value)}
          />
        )}
      </Field>
      <datalist id={list}>
        {folders.map((name) => (
          <option key={name} value={name} />
        ))}
      </datalist>
      <Button kind="primary" type="submit">
        Move
      </Button>
    </DialogForm>
  );
}
