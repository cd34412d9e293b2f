import { useMutation, useQueryClient } from "@tanstack/react-query";
import { FolderInput } from "lucide-react";
import { useState } from "react";
import { importModel, isTaken, refreshModels, useServerInfo } from "../api/manage";
import { Button } from "../ui/Button";
import { Field } from "../ui/Field";
import { describeRefusal } from "./CopyDialog";
import styles from "./PullForm.module.css";

/** Asks for the path of a model on the server's machine and gives it a name. */
export function ImportForm() {
  const queries = useQueryClient();
  const folders = useServerInfo().data?.import_folders;
  const [path, setPath] = useState("");
  const add = useMutation({
    mutationFn: (replace: boolean) => importModel(path.trim(), replace),
    onSuccess: async () => {
      setPath("");
      await refreshModels(queries);
    },
  });
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        add.mutate(false);
      }}
    >
      <Field
        label="Import a file or folder"
        hint={describeFolders(folders)}
        error={describeRefusal(add.error, "of the name of this file")}
      >
        {(ids) => (
          <div className={styles.row}>
            <input
              {...ids}
              value={path}
              onChange={(event) => {
                setPath(event.target.value);
                add.reset();
              }}
              placeholder="/home/me/models/model.gguf"
              spellCheck={false}
              autoCapitalize="off"
              autoComplete="off"
              disabled={folders?.length === 0}
            />
            <Button type="submit" disabled={!path.trim() || add.isPending}>
              <FolderInput aria-hidden="true" />
              {add.isPending ? "Importing…" : "Import"}
            </Button>
            {isTaken(add.error) && (
              <Button kind="danger" onClick={() => add.mutate(true)}>
                Replace it
              </Button>
            )}
          </div>
        )}
      </Field>
    </form>
  );
}

/** What may be imported, or how to allow it. */
function describeFolders(folders: readonly string[] | undefined): string {
  if (folders?.length === 0)
    return "To import files of the server's machine here, start it with --import-folders FOLDER; or run “mlxr import PATH” there.";
  const where = folders ? `, below ${folders.join(" or ")}` : "";
  return `A GGUF file or a folder from Hugging Face on the server's machine${where}. It stays where it is.`;
}
