import { Empty } from "../ui/Notice";

export default function ModelsView(_: { detail: string }) {
  return <Empty title="Models" />;
}
