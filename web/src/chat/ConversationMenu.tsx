import { FileJson, FileText, Pencil, Trash2 } from "lucide-react";
import { useState } from "react";
import { go } from "../lib/route";
import { Button } from "../ui/Button";
import { Dialog, DialogForm } from "../ui/Dialog";
import { Field } from "../ui/Field";
import { Menu, MenuItem } from "../ui/Menu";
import { fileName, saveFile } from "./files";
import { readWholes, removeConversation, renameConversation } from "./library";
import { exportJson, exportMarkdown } from "./transfer";
import type { Conversation } from "./types";

/** What can be done with a whole conversation. */
export function ConversationMenu({ conversation, small = true }: { conversation: Conversation; small?: boolean }) {
  const [asked, setAsked] = useState<"rename" | "delete" | null>(null);
  const close = () => setAsked(null);
  return (
    <>
      <Menu label={`Actions for “${conversation.title}”`} small={small}>
        <MenuItem onSelect={() => setAsked("rename")}>
          <Pencil /> Rename
        </MenuItem>
        <MenuItem onSelect={() => void saveAs(conversation, "json")}>
          <FileJson /> Export as JSON
        </MenuItem>
        <MenuItem onSelect={() => void saveAs(conversation, "md")}>
          <FileText /> Export as Markdown
        </MenuItem>
        <MenuItem danger onSelect={() => setAsked("delete")}>
          <Trash2 /> Delete
        </MenuItem>
      </Menu>
      <RenameDialog key={asked} open={asked === "rename"} conversation={conversation} onClose={close} />
      <DeleteDialog open={asked === "delete"} conversation={conversation} onClose={close} />
    </>
  );
}

async function saveAs(conversation: Conversation, ending: "json" | "md"): Promise<void> {
  const [whole] = await readWholes([conversation]);
  if (!whole) return;
  const name = fileName(conversation.title, ending);
  if (ending === "json") saveFile(name, exportJson([whole]), "application/json");
  else saveFile(name, exportMarkdown(whole), "text/markdown");
}

interface DialogProps {
  open: boolean;
  conversation: Conversation;
  onClose: () => void;
}

function RenameDialog({ open, conversation, onClose }: DialogProps) {
  const [title, setTitle] = useState(conversation.title);
  const save = () => {
    renameConversation(conversation.id, title);
    onClose();
  };
  return (
    <Dialog open={open} title="Rename the conversation" onClose={onClose}>
      <DialogForm onSubmit={save}>
        <Field label="Title">
          {(ids) => <input {...ids} value={title} maxLength={200} onChange={(event) => setTitle(event.target.value)} />}
        </Field>
        <Button kind="primary" type="submit" disabled={!title.trim()}>
          Rename
        </Button>
      </DialogForm>
    </Dialog>
  );
}

function DeleteDialog({ open, conversation, onClose }: DialogProps) {
  const remove = () => {
    onClose();
    removeConversation(conversation.id);
    if (location.hash.endsWith(conversation.id)) go("chat");
  };
  return (
    <Dialog
      open={open}
      title="Delete this conversation?"
      onClose={onClose}
      actions={
        <>
          <Button onClick={onClose}>Keep it</Button>
          <Button kind="danger" onClick={remove}>
            Delete it
          </Button>
        </>
      }
    >
      <p>“{conversation.title}” with all its branches is removed from this browser. It cannot be brought back.</p>
    </Dialog>
  );
}
